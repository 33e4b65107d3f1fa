package compilers_test

import (
	"os"
	"testing"

	"github.com/epcached/epcached/compilers/compilertest"
)

func TestMain(m *testing.M) {
	status := m.Run()
	compilertest.RemoveWorker()
	compilertest.RemoveTestEP()
	os.Exit(status)
}
