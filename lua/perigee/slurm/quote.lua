-- A word as a shell takes it, whatever is in it.
return function(word) return "'" .. tostring(word):gsub("'", "'\\''") .. "'" end
