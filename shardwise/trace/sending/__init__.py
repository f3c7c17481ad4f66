"""What ranks sent each other: messages by axis and collective, on the host and on the device, matched over ranks."""
