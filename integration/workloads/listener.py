"""Prints which signals it gets, and how many. SIGTERM ends it in the way that --end names."""

import argparse
import os
import signal
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--end", choices=["exit", "abort", "segv", "default"], default="exit")
options = parser.parse_args()

heard = {signal.SIGUSR1: 0, signal.SIGUSR2: 0, signal.SIGTERM: 0}
awaited = set(heard)
if options.end == "default":
    awaited.discard(signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
print("READY", flush=True)
while not heard[signal.SIGTERM]:
    got = signal.Signals(signal.sigwait(awaited))
    heard[got] += 1
    print(got.name, heard[got], flush=True)
print("END", *heard.values(), flush=True)
if options.end == "abort":
    os.abort()
if options.end == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(7)
