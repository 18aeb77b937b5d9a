"""Random command lines and damaged files: no traceback, no hang, no typo that passes for a setting.

cd tests && python -m fuzz words --seed 7 --count 10000     # command lines, over all commands
cd tests && python -m fuzz damage --seed 7 --count 1000     # files of a run, a measurement, a cluster, ... that are damaged
"""
