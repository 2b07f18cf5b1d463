"""The live page: a web server on this machine that shows runs from their folders."""
