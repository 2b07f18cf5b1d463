"""`partita site doctor`: checks of a site before it takes part. Nothing is sent but a request for the server's time."""
