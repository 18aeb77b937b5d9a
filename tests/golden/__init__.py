"""Golden traces: what mtrain computed when these files were recorded, to check a change against.

From tests/:

    python -m golden check                  # every case, with tolerances: CPUs round differently
    python -m golden check --exact          # every case, every bit, on the machine that recorded
    python -m golden check --only losses    # a group, the start of "GROUP/NAME", a part of a name
    python -m golden record --only TEXT     # replace what was recorded
    python -m golden record --files         # also make the checkpoint and the profile anew

Groups:

    losses       tiny trainings on CPU workers: loss and gradient norm of every step
    memory       bytes of dry runs, by moment and part
    predictions  simulated times, exact work and exact bytes
    profiles     rows of recorded steps, without their times
    files        an old checkpoint that resumes, old profiles that read as before

`python -m pytest tests/golden` checks a part of each group, `-m slow` the rest.

Only `reach` knows how the product names things. After a rename, change `reach` and record nothing:
the check must pass as it is.

Record again only where a change shall compute something else, and say in the commit which numbers
move and why. Record new cases alone, with --only. The checkpoint and the profile in files/ stay as
long as mtrain promises to read them; a new format gets new files.

Losses depend on torch's version as well as on the CPU. `--exact` holds for recorded/versions.json,
and says which versions differ.
"""
