"""Programs that measure; nothing in here is imported elsewhere.

``python -m bench`` (or ``make bench``, ``dithoist bench``) runs the cases of :mod:`.cases` and prints what
:mod:`.measure` found. ``python -m bench.baselines`` judges a run by an earlier one, ``python -m bench.overhead``
says what one call costs besides its work, ``python -m bench.peak`` measures memory, and ``python -m
bench.masked_fill`` writing masked rows.

A figure never mixes runs: ratios are made from times of the same case in the same process, taken in turns.
"""
