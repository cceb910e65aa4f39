-- The program's commands: a name, for which perigee.commands.NAME describes the command (see
-- perigee.cli), and what it does.
return {
  { "train", "train a recipe" },
  { "resume", "continue a run directory" },
  { "fork", "start a new run from a checkpoint" },
  { "sweep", "train a recipe at every point of a grid" },
  { "watch", "live curves of runs in the terminal" },
  { "report", "tables and figures of finished runs" },
  { "eval", "validation loss and Hilbert RMS of checkpoints" },
  { "generate", "write text with a trained model" },
  { "export", "metrics or the head for other programs" },
  { "data", "prepare or check training data" },
  { "repl", "a Lua prompt on runs and checkpoints" },
  { "attach", "the same prompt inside a run that is training" },
  { "run", "run a Lua script with the module at hand" },
  { "bench", "how fast this machine trains" },
  { "doctor", "what this machine and this build can do" },
}
