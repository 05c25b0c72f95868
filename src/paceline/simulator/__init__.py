"""A cluster in virtual time: clock, devices, network, faults and a trace. It knows nothing of learning."""
