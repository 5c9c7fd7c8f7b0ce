"""What a run writes down: metrics, time lines, profiles, how far it is, and how it went."""
