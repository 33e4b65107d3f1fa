package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/epcached/epcached/cmd/epcachectl/internal/exit"
)

// addCompletion adds cobra's own verb, with examples: nobody remembers where each shell looks.
func addCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd("bash") // any word that is no request of a shell's for completions
	completion, _, err := root.Find([]string{"completion"})
	if err != nil || completion == root {
		return // this version of cobra has none
	}
	completion.Long = strings.TrimSpace(completion.Long) + exit.Help(exit.Done, exit.BadUsage)
	const bash = "  epcachectl completion bash > ~/.local/share/bash-completion/completions/epcachectl"
	const fish = "  epcachectl completion fish > ~/.config/fish/completions/epcachectl.fish"
	completion.Example = bash + "\n" + fish
	for shell, example := range map[string]string{
		"bash": bash, "zsh": `  epcachectl completion zsh > "${fpath[1]}/_epcachectl"`, "fish": fish,
		"powershell": "  epcachectl completion powershell | Out-String | Invoke-Expression",
	} {
		if cmd, _, err := completion.Find([]string{shell}); err == nil {
			cmd.Example = example
			cmd.Long = strings.TrimSpace(cmd.Long) + exit.Help(exit.Done, exit.BadUsage)
		}
	}
}
