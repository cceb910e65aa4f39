# What zsh offers: a second zsh on a pseudo-terminal completes a line and shows what it has become.
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1= PS2= fpath=($PERIGEE_FUNCTIONS \$fpath); autoload -U compinit; compinit -u -D"
zpty -w shell "stty -echo; show() { print -r -- \"<\$BUFFER>\"; BUFFER=; zle reset-prompt }"
zpty -w shell "zle -N show; bindkey '^I' complete-word; bindkey '^X' show; print rea''dy"
zpty -r -m shell output '*ready*'
# expect LINE RESULT: LINE and a tab become RESULT
expect() {
  local output
  zpty -w -n shell "$1"$'\t\x18'
  zpty -r -m shell output '*<*>*'
  if [[ $output != *"<$2>"* ]]; then
    print -r -- "zsh: '$1' became ${(V)output}"
    exit 1
  fi
}
expect "perigee trai" "perigee train "
expect "perigee data chec" "perigee data check "
expect "perigee train --recom" "perigee train --recompute="
expect "perigee train --device=cu" "perigee train --device=cuda "
zpty -d shell
