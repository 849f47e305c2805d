"""The fault suite: kills, damaged files, wrong values, scarce machines, and two of everything at once.

    make torture                        all of it, in minutes
    python -m torture --only kills      one part (in tests/, or with tests/ on PYTHONPATH)

Every case ends in one of the outcomes of `harness.OUTCOMES`. The suite passes if no case is bad: no traceback, no
silent change of a figure or a verdict, no lost file, no hang.
"""
