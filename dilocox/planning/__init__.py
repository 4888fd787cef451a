"""What a run will look like, worked out from its configuration. No torch here."""
