"""The keepers that connect to this daemon, and the registry of their ranks.

listener.py accepts keepers, hello.py validates what they send first, link.py is one connected keeper. adoption.py updates
the registry (ranks.py) when keepers connect and end. relay.py forwards stdio and signals between nodes.
"""
