"""Tests on a real cluster: kind with a control plane and two workers, our images and our chart."""
