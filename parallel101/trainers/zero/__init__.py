"""What zero_1_2_3.py needs: flat arrays, and when a bucket is complete and a layer is used."""
