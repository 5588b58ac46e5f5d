"""The health of this node: checks that read counters and the kernel's log, and the alarms that they raise.

Invariant: nothing here can harm a rank, a move or the daemon. A check that fails becomes "unable" with its reason. What can
hang (NVML, programs of the administrator, checks of other packages) runs in child processes. Alarms are latched: they survive
restarts, and only an operator clears them. What to do about an alarm is decided elsewhere (migrator/autopilot).

alarms.py and windows.py are pure. event_log.py keeps alarms and events on disk. monitor.py runs the checks.
"""
