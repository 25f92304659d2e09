"""The parts of `check_sandbox`: contract checks, hostile programs, canaries."""
