"""Memory of devices, of a simulated device, of the host and of disks."""
