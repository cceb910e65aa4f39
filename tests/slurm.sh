#!/usr/bin/env bash
# tests/slurm.sh BUILD WORK: sweeps on a real Slurm, a private cluster of two emulated nodes on this
# machine: four runs of which one is requeued and one preempted equal the same runs trained here bit
# for bit; one training over both nodes. Needs slurm-wlm and munge; exit 77 where that cluster does
# not come up.
set -uo pipefail
build=$(realpath "$1") work=$2
program=$build/perigee
rm -rf "$work"
mkdir -p "$work"
work=$(realpath "$work")
count=0
ok() { echo "ok $((count += 1)) - $*"; }
die() {
  echo "$*"
  for file in "$work"/slurm/*.log "$work"/runs/*/logs/*.log; do
    [ ! -s "$file" ] || { echo "==> $file"; tail -n 8 "$file"; }
  done
  exit 1
}
for name in sbatch slurmctld slurmd munged; do
  command -v $name >/dev/null || { echo "there is no $name"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "a cluster of its own needs root"; exit 77; }

# ---- a cluster ---------------------------------------------------------------------------------
# Paths of sockets are short: not below WORK, which may be anywhere.
slurm=$(mktemp -d /tmp/perigee-slurm.XXXXXX)
daemons=()
clean_up() {
  local pid job
  for job in $(squeue -h -o %A 2>/dev/null); do scancel "$job"; done 2>/dev/null
  for pid in "${daemons[@]}"; do kill "$pid" 2>/dev/null; done
  for pid in "${daemons[@]}"; do
    for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    kill -9 "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
  done
  # What jobs were still running: their environment names this cluster.
  for pid in $(grep -zlsx "SLURM_CONF=$slurm/slurm.conf" /proc/[0-9]*/environ | cut -d / -f 3); do
    [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
  done
  rm -rf "$slurm"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP
mkdir "$slurm"/{state,n1,n2,tmp-n1,tmp-n2}
chmod 755 "$slurm"
ln -s "$slurm" "$work/slurm"
dd if=/dev/urandom of="$slurm/key" bs=1 count=1024 status=none
chmod 400 "$slurm/key"
# Ports that nobody listens at now.
read -r -a ports < <(python3 -c 'import socket
held = [socket.socket() for _ in range(3)]
for s in held: s.bind(("127.0.0.1", 0))
print(*[s.getsockname()[1] for s in held])')
host=$(hostname -s)
cat >"$slurm/slurm.conf" <<END
ClusterName=perigee
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$slurm/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$slurm/state
SlurmdSpoolDir=$slurm/%n
TmpFS=$slurm/tmp-%n
SlurmctldPidFile=$slurm/slurmctld.pid
SlurmdPidFile=$slurm/%n.pid
SlurmctldLogFile=$slurm/slurmctld.log
SlurmdLogFile=$slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000,batch_sched_delay=0,requeue_setup_env_fail
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=2
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF
END
export SLURM_CONF=$slurm/slurm.conf
munged --foreground --force --key-file="$slurm/key" --socket="$slurm/munge.socket" \
  --pid-file="$slurm/munged.pid" --log-file="$slurm/munged.log" --seed-file="$slurm/munged.seed" \
  >"$slurm/munged.out.log" 2>&1 &
daemons=($!)
until_true() { # until_true SECONDS COMMAND...
  local limit=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $limit ] || return 1
    sleep 0.2
  done
}
until_true 20 test -S "$slurm/munge.socket" || { cat "$slurm"/munged*.log; echo "munged does not start"; exit 77; }
slurmctld -D -f "$SLURM_CONF" >"$slurm/ctld.out.log" 2>&1 &
daemons=($! "${daemons[@]}")
for node in n1 n2; do
  slurmd -D -f "$SLURM_CONF" -N $node >"$slurm/$node.out.log" 2>&1 &
  daemons=($! "${daemons[@]}")
done
nodes_up() { [ "$(sinfo -h -p low -t idle -o %D 2>/dev/null)" = 2 ]; }
until_true 60 nodes_up || { sinfo; tail -n 5 "$slurm"/*.log; echo "the cluster does not start"; exit 77; }
echo "cluster up after $SECONDS s"

# ---- a recipe ----------------------------------------------------------------------------------
cd "$work"
"$program" data prepare --text "$OLDPWD/README.md" --out data --vocab-size 300 --val-fraction 0.2 \
  >prepare.log || die "no data"
cat >"the recipe's.lua" <<'END'
local pg = require "perigee"
local p = pg.params { head = pg.choice { "rownorm", "adamw" }, seed = 0, wait = 0.0, updates = 30 }
local optimizer = { rownorm = pg.optim.rownorm { lr = 1e-2 }, adamw = pg.optim.adamw { lr = 1e-2 } }
return pg.recipe {
  name = "little", seed = p.seed, updates = p.updates, log = { every = 1 },
  model = { layers = 1, width = 8, heads = 1, context = 8 },
  data = pg.data.shards { path = "data" }, batch = { sequences = 4, micro = 2 },
  optimizers = { { role = "embedding", pg.optim.adamw { lr = 1e-2 } },
    { role = "backbone", pg.optim.muon { lr = 1e-2 } }, { role = "head", optimizer[p.head] } },
  hooks = { pg.every(1, function() if p.wait > 0 then pg.core.sleep(p.wait) end end),
    pg.checkpoint { every = 10 } },
}
END
grid=("the recipe's.lua" --grid head=adamw,rownorm --grid seed=0,1 --threads 1)
status() { "$program" sweep "${grid[@]}" --set wait=0.4 --out runs/far --slurm --status 2>&1; }
has_status() { status | grep -qE "^$1 +$2 "; }
updates() { # updates RUN AT_LEAST
  [ "$(grep -c progress/update "runs/far/$1/metrics.jsonl" 2>/dev/null || true)" -ge "$2" ]
} 2>/dev/null

# ---- four runs, one requeued and one preempted -------------------------------------------------
far=(sweep "${grid[@]}" --set wait=0.4 --out runs/far --slurm --slurm-partition low --slurm-cpus 1
  --slurm-time 10)
"$program" "${far[@]}" >submit.log 2>&1 || { cat submit.log; die "nothing was submitted"; }
grep -q '4 runs submitted' submit.log || { cat submit.log; die "not 4 runs"; }
"$program" "${far[@]}" >again.log 2>&1 || { cat again.log; die "the second call fails"; }
! grep -q submitted again.log || { cat again.log; die "submitted twice"; }
ok "a sweep is submitted once"
until_true 60 updates head=adamw,seed=0 3 || { status; die "the first run does not train"; }
until_true 60 updates head=rownorm,seed=1 3 || { status; die "the last run does not train"; }
status >status.log
[ $? = 75 ] && grep -qE '^head=adamw,seed=0 +running' status.log ||
  { cat status.log; die "no run is running"; }
"$program" sweep "${grid[@]}" --set wait=0.4 --out runs/far >here.log 2>&1 &&
  die "a sweep on this machine takes the same folder"
grep -q 'of Slurm' here.log || { cat here.log; die "not refused for Slurm"; }
ok "its state is told, and a sweep beside it is refused"
job=$(squeue -h -o %F | head -n 1)
requeued() { grep -q 'stopped' "runs/far/$1/summary.json" 2>/dev/null; }
scancel --signal=TERM "${job}_0" || die "no signal"
until_true 60 grep -q 'stopped' "runs/far/logs/head=adamw,seed=0.log" || die "the run does not save"
ok "a signalled run saves and is requeued"
# Both nodes whole, for a moment: whatever of the four still runs has to leave.
sbatch --parsable -p high -N 2 --exclusive -o /dev/null --wrap 'sleep 1' >preempt.log || die "no job"
preempted() { grep -lq 'stopped' runs/far/logs/head=*,seed=1.log; }
until_true 60 preempted || { squeue; die "no run is preempted"; }
ok "a preempted run saves"
# Slurm lets a requeued job wait: not here.
hasten() {
  local task
  for task in $(squeue -h -r -t PENDING -o %i); do
    scontrol update jobid="$task" StartTime=now 2>/dev/null
  done
  [ "$(status | grep -c 'finished ')" = 4 ]
}
until_true 240 hasten || { status; squeue; die "the sweep does not end"; }
"$program" "${far[@]}" >end.log 2>&1 || { cat end.log; die "the finished sweep is not complete"; }
grep -q '4 of 4 runs finished' end.log && grep -q 'runs are paired' end.log ||
  { cat end.log; die "not all finished"; }
ok "the sweep finishes"
"$program" sweep "${grid[@]}" --out runs/near >near.log 2>&1 || { cat near.log; die "here"; }
for run in head=adamw,seed=0 head=adamw,seed=1 head=rownorm,seed=0 head=rownorm,seed=1; do
  for file in model optimizer; do
    cmp "runs/near/$run/checkpoints/00000030/$file.safetensors" \
      "runs/far/$run/checkpoints/00000030/$file.safetensors" || die "$run differs"
  done
done
ok "its runs equal those trained here, bit for bit"

# ---- one training over two nodes ---------------------------------------------------------------
two=(sweep "the recipe's.lua" --set updates=8 --out runs/two --slurm --nodes 2 --slurm-cpus 1
  --slurm-time 10 --threads 1)
"$program" "${two[@]}" >two.log 2>&1 || { cat two.log; die "not submitted"; }
done_two() { "$program" "${two[@]}" --status >two.log 2>&1; }
until_true 120 done_two || { cat two.log; die "the two nodes do not finish"; }
grep -q '"ranks": *2' runs/two/little/config.json || die "not two ranks"
ok "one training runs over two nodes"
echo "all after $SECONDS s"
