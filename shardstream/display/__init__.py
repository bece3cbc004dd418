"""What people see of samples: pictures, kinds of fields, HTML for notebooks. No file here imports torch."""

from shardstream.display.field_pictures import Kind as Kind
from shardstream.display.field_pictures import Picture as Picture
from shardstream.display.field_pictures import choose_thumbnail as choose_thumbnail
from shardstream.display.field_pictures import extension as extension
from shardstream.display.field_pictures import image_size as image_size
from shardstream.display.field_pictures import is_mask_array as is_mask_array
from shardstream.display.field_pictures import kinds_of as kinds_of
from shardstream.display.field_pictures import npz_statistics as npz_statistics
from shardstream.display.field_pictures import played_type as played_type
from shardstream.display.field_pictures import render as render
from shardstream.display.field_pictures import render_value as render_value
from shardstream.display.field_pictures import statistics as statistics
from shardstream.display.notebook import Bars as Bars
from shardstream.display.notebook import SampleView as SampleView
from shardstream.display.notebook import bars_html as bars_html
from shardstream.display.notebook import samples_html as samples_html
from shardstream.display.notebook import show as show
from shardstream.display.notebook import stream_html as stream_html
