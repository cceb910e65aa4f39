std = "lua54+busted"
max_line_length = 100
exclude_files = { "build/" }
files["tests/bind_*"] = { max_line_length = 120 }
