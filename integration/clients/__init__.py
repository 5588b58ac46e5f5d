"""Programs of the shapes that users run, moved while they work. Each test says what such a program must not notice."""
