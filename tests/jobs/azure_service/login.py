"""Microsoft Entra ID: one service principal may sign in."""

from __future__ import annotations

from tests.jobs.azure_service.exchange import Reply, Request

HOST = "login.microsoftonline.com"
TENANT = "11111111-1111-1111-1111-111111111111"
CLIENT = "22222222-2222-2222-2222-222222222222"
SECRET = "the-secret-of-the-principal"
TOKEN = "the-token-of-the-principal"
ENVIRONMENT = {"AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": CLIENT, "AZURE_CLIENT_SECRET": SECRET}


def answer(request: Request) -> Reply:
    """Discovery and tokens, as the OpenID Connect documents of the real service have them."""
    if request.path.endswith("/openid-configuration"):
        tenant = f"https://{HOST}/{TENANT}"
        return Reply(
            {
                "authorization_endpoint": f"{tenant}/oauth2/v2.0/authorize",
                "token_endpoint": f"{tenant}/oauth2/v2.0/token",
                "issuer": f"{tenant}/v2.0",
            }
        )
    if request.path.endswith("/discovery/instance"):
        metadata = {"preferred_network": HOST, "preferred_cache": HOST, "aliases": [HOST]}
        return Reply({"tenant_discovery_endpoint": "", "metadata": [metadata]})
    if SECRET.encode() not in request.body:
        description = "AADSTS7000215: Invalid client secret provided."
        return Reply({"error": "invalid_client", "error_description": description}, 401)
    return Reply({"token_type": "Bearer", "expires_in": 3599, "access_token": TOKEN})
