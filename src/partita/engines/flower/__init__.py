"""Engine for clients on other machines, connected through Flower."""
