"""The HTTP server and the terminal chat, imported when `atoll serve` or `atoll chat` runs. The server needs `atoll[serve]`."""
