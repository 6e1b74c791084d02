"""The fleet: one pure state machine, the adapter to Ray that drives it, its routers and its control socket."""
