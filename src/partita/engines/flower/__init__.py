"""Clients on other machines, carried by Flower."""
