"""The protocol of a move on a pure model: every prefix, every participant dying, every partition."""
