"""The linear-attention laboratory of FedFrozen: closed forms, a fast simulator, and the figures drawn from them."""
