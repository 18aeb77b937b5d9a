"""Golden traces: recorded results of mtrain, to show that a change computes the same numbers.

From tests/:

    python -m golden check                  # every case, with tolerances: CPUs round differently
    python -m golden check --exact          # every case, every bit, on the machine that recorded
    python -m golden check --only losses    # a group, the start of "GROUP/NAME", part of a name
    python -m golden record --only TEXT     # replace recorded results
    python -m golden record --files         # also recreate the old checkpoint and profile

Groups:

    losses       tiny trainings on CPU workers: loss and gradient norm of every step
    memory       bytes of dry runs, by moment and part
    predictions  simulated times, exact work and exact bytes
    profiles     rows of recorded steps, without their times
    files        an old checkpoint that resumes, old profiles that read as before

`python -m pytest tests/golden` checks a part of each group, `-m slow` the rest.

Only `reach` knows the names in mtrain. After a rename, change `reach` and record nothing: the check
must pass unchanged.

Record again only if a change intends to compute something else, and say in the commit which numbers
move and why. Record only new cases, with --only. The checkpoint and the profile in files/ stay as
long as mtrain promises to read them; a new format gets new files.

Losses depend on the version of torch and on the CPU. `--exact` is valid with the versions in
recorded/versions.json, and prints those that differ.
"""
