"""The worker on a device: no host round trips while drafting, one copy to the host per iteration."""
