"""The compiled engine (JAX): from a checked request to rounds on devices."""
