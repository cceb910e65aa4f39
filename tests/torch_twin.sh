#!/usr/bin/env bash
# tests/torch_twin.sh BUILD PYTHON TEXT: updates of the quickstart with both heads, trained on TEXT,
# against their twins in PyTorch; and that the twin sees what is small: an eps, a step of the bias
# correction, a batch, a factor that are not Perigee's.
set -euo pipefail
build=$1 python=$2 text=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1

"$build/perigee" data prepare --text "$text" --out "$work/data" --vocab-size 512 --quiet
for head in rownorm adamw; do
  "$build/perigee" run tools/torch_twin.lua recipes/quickstart.lua "$work/$head" 5 updates=20 \
    head=$head data="$work/data"
  "$python" tools/torch_twin.py "$work/$head"
done

# mistake HEAD WHAT SED: with twin.json changed by SED the twin calls WHAT wrong.
mistake() {
  local said
  cp "$work/$1/twin.json" "$work/right.json"
  sed -i "$3" "$work/$1/twin.json"
  if cmp -s "$work/$1/twin.json" "$work/right.json"; then
    echo "torch_twin.sh: '$3' changes nothing" >&2
    exit 1
  fi
  if said=$("$python" tools/torch_twin.py "$work/$1") ||
    ! grep -q "twin: $2 .*WRONG" <<<"$said"; then
    echo "torch_twin.sh: '$3' is not seen in $2:" >&2
    echo "$said" >&2
    exit 1
  fi
  cp "$work/right.json" "$work/$1/twin.json"
}
mistake rownorm rownorm 's/"eps": 1e-8/"eps": 1e-6/'
mistake rownorm slot 's/"beta": 0.95/"beta": 0.951/'
mistake rownorm loss 's/"data_seed": 0/"data_seed": 1/'
mistake rownorm gradient 's/"clip": 1.0/"clip": 1.001/'
mistake adamw adamw 's/"eps": 1e-10/"eps": 1e-8/'
mistake adamw adamw 's/"updates": 5/"updates": 6/'
mistake adamw muon 's/"eps": 1e-5/"eps": 1e-4/'
mistake adamw weight 's/"weight_decay": 0.1/"weight_decay": 0.11/'
echo "torch_twin.sh: 8 mistakes are seen"
