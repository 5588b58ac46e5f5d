"""Work on files whose paths a user controls: without following links, and with that user's rights wherever possible."""
