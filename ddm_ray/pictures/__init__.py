"""Pictures and pages: grids of images, charts, PNG files, HTML reports. Knows no run and no model."""
