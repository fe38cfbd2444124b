"""The mathematics of decentralized diffusion: torch and numpy only, no storage, no waiting."""
