"""The benchmark's parts: what is run (workloads), on which shapes (models), by whom (engines), against what (floors).

Owns: everything that `bench.py` needs and the core does not. Invariant: importing it is cheap (neither torch nor an
engine), since a child process measures its start-up from before its imports. It deliberately holds no numbers of past
runs: those are lines of benchmarks/results.jsonl.
"""
