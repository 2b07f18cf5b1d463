"""What runs at a site: its settings, its policy, its own program and its log."""
