"""Random command lines and damaged files must not cause tracebacks, hangs or accepted typos.

cd tests && python -m fuzz words --seed 7 --count 10000   # command lines, over all commands
cd tests && python -m fuzz damage --seed 7 --count 1000   # damaged files of a run, a cluster, ...
cd tests && python -m fuzz kills --seed 7 --count 40      # training runs, killed and resumed
"""
