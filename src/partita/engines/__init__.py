"""Carriage: how jobs reach clients and updates come back."""
