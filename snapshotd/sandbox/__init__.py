"""Sandboxes that the daemon's children put themselves into, before they touch anything that a stranger made.

`profiles.py` says what each kind of child may do, `enter.py` applies a profile to the calling process: `privileges.py` (user,
capabilities), `landlock.py` (files, TCP) and `filter.py` (system calls). The daemon itself and CRIU have no sandbox, because
restored ranks descend from them and would inherit it.

Only the standard library is imported here: children that start during the pause of a move need these modules.
"""
