"""Eight CPU devices, for all tests alike: JAX wants to know before it looks for devices."""

import jax

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
