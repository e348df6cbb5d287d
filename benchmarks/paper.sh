#!/usr/bin/env bash
# The paper's seven tasks at once on one GPU: each in a process of its own, on its own share of 16 cores.
#
#     benchmarks/paper.sh        then: tail -n 1 runs/bench/*.log
#
# What was stopped goes on when it is started again. With fewer cores, run `t3d bench returns --suite paper` instead.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p runs/bench
# NVIDIA's MPS lets processes use the GPU side by side instead of in turns.
nvidia-cuda-mps-control -d 2> /dev/null || echo "MPS runs already, or there is none."

start() { # cores, task, more options
  local cores=$1 task=$2
  shift 2
  OMP_NUM_THREADS=1 taskset -c "$cores" python3 -m t3d bench returns --suite paper --only "$task" "$@" \
    > "runs/bench/$task.log" 2>&1 &
}

start 0-5 Ant --eval-every 25000
start 6-8 HalfCheetah
start 9-10 Walker2d --eval-every 25000
start 11-12 Hopper --eval-every 25000
start 13 Reacher
start 14 InvertedPendulum
start 15 InvertedDoublePendulum
wait
echo "all of them: $((SECONDS / 60)) minutes"
python3 -m t3d bench table
