"""Tests the protocol of a move on a pure model: with every prefix, every participant dying, and every partition."""
