# Readline splits words at `=` and `:`. This function joins the parts for the program, and removes
# from its answers what precedes the part at the cursor, because bash replaces only that part.
_joined_words_NAME() {
    local line=$COMP_LINE part='' previous='' prefix='' index=0 i text
    local -a joined=()
    for i in "${!COMP_WORDS[@]}"; do
        part=${COMP_WORDS[i]}
        text=${line#"${line%%[![:space:]]*}"}
        if [[ $text == "$line" && -n $previous && ($part == [=:]* || $previous == *[=:]) ]]; then
            if ((i == COMP_CWORD)); then prefix=${joined[-1]}; fi
            joined[-1]+=$part
        else
            joined+=("$part")
        fi
        previous=$part
        line=${text#"$part"}
        if ((i == COMP_CWORD)); then
            index=$((${#joined[@]} - 1))
            previous=
            if [[ -z $2 && $part == [=:]* ]]; then prefix+=$part; fi
        fi
    done
    local COMP_CWORD=$index
    local -a COMP_WORDS=("${joined[@]}")
    _clap_complete_NAME "$1" "$prefix$2" "$3"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
