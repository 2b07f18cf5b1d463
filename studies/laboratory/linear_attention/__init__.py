"""The linear-attention laboratory of FedFrozen: closed forms, a fast simulator, and their figures."""
