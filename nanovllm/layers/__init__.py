"""The layers that models are made of. Each takes what it needs as arguments and knows no configuration object."""
