"""What has to be true on a real cluster: kind, one control plane and two workers, our images, our chart."""
