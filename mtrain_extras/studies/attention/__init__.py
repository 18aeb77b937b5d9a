"""The study of attention itself: largest keys, maps of heads, scores by distance, overlaps."""
