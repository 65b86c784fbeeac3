"""Lossy codes for slow links, decoded and added in float32."""
