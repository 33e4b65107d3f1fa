package config

import (
	"fmt"

	"github.com/epcached/epcached/cache/rules"
)

// LoadRules reads the rules that the settings name, over the shipped ones. The error names file, line and column of all that is wrong in them.
func (s *Settings) LoadRules() (*rules.Set, error) {
	if len(s.Rules) == 0 {
		return rules.Shipped(), nil
	}
	own, err := rules.Load(s.Rules...)
	if err != nil {
		return nil, fmt.Errorf("field \"rules\": %w", err)
	}
	return own.Over(rules.Shipped()), nil
}
