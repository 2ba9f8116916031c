"""Racks of four devices: 10 GB/s inside of a rack, 1 GB/s between racks. What a topology file says, as a dict."""

TWO_RACKS = {
    "mesh": "rack=2,device=4",
    "device": {"memory": "8GiB", "bandwidth": 5e10, "launch": 5e-6, "flops": {"f32": 2e11, "other": 1e11}},
    "levels": [{"devices": 4, "alpha": 5e-6, "beta": 1e-10}, {"alpha": 2e-5, "beta": 1e-9}],
}
