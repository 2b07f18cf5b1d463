"""The folders that `partita sites init` writes: one for the server and one for each site."""
